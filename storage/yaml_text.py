"""YAML that a person writes: one plain document, read without a surprise."""

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently keep the last, and aliases (*name), by
    which a few lines can stand for more text than fits into memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                problem=f"line {event.start_mark.line + 1}: alias *{event.anchor}: aliases are not allowed"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            line = node.start_mark.line + 1
            raise yaml.constructor.ConstructorError(problem=f"line {line}: key given twice: {', '.join(twice)}")
        return super().construct_mapping(node, deep)


def loads(data: bytes) -> Any:
    """The plain value of a YAML document; ValueError, with a sentence, for anything else."""
    try:
        return yaml.load(data.decode(), Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None
