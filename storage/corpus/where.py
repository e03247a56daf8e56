"""Row filters: DuckDB SQL expressions that are functions of one row, and of nothing else.

An expression may compare, combine, cast and call the functions named here. Anything whose value could depend on other
rows, the time, chance, a setting or a file of this machine (queries, windows, aggregates, random(), now(), a collation)
is refused when the recipe is read.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

import duckdb
import pyarrow as pa

from storage.errors import UsageError

Type = Literal["BIGINT", "DOUBLE", "VARCHAR", "BOOLEAN", "JSON"]  # of a column of JSON rows

_ARROW = dict(BIGINT=pa.int64(), DOUBLE=pa.float64(), VARCHAR=pa.string(), BOOLEAN=pa.bool_(), JSON=pa.string())
_PYTHON: dict[str, tuple[type, ...]] = {"BIGINT": (int,), "DOUBLE": (float, int), "VARCHAR": (str,), "BOOLEAN": (bool,)}
_NODES = {
    *("COLUMN_REF", "CONSTANT", "TYPE", "CAST", "CASE"),
    *("COMPARISON", "BETWEEN", "CONJUNCTION", "OPERATOR", "FUNCTION"),
}
FUNCTIONS = {
    *("+", "-", "*", "/", "//", "%", "||", "->", "->>", "~~", "!~~", "~~*", "!~~*"),
    *("abs", "floor", "ceil", "round", "length", "len", "strlen", "lower", "upper", "trim", "substring"),
    *("contains", "starts_with", "ends_with", "prefix", "suffix", "regexp_matches", "regexp_full_match"),
    *("list_contains", "list_has_any", "list_has_all", "array_extract", "struct_extract"),
    *("json_extract", "json_extract_string", "json_array_length", "json_contains"),
}  # fmt: skip
_SETTINGS: dict[str, Any] = {
    "threads": 1,
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


def _connection() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config=_SETTINGS)
    connection.execute("set TimeZone = 'UTC'")  # else a time with a zone is compared by this machine's
    return connection


def columns_of(where: str) -> tuple[str, ...]:
    """The columns that the expression reads, sorted. ValueError if it is not an expression over one row."""
    try:
        duckdb.SQLExpression(where)
        with _connection() as connection:
            ((found,),) = connection.execute("select json_serialize_sql(?)", [f"select {where}\n"]).fetchall()
    except duckdb.Error as error:
        raise ValueError(f"{where!r} is not an SQL expression: {error}") from None
    parsed = json.loads(found)
    if parsed["error"]:
        raise ValueError(f"{where!r} is not an SQL expression: {parsed['error_message']}")
    columns: set[str] = set()
    for node in _nodes(parsed["statements"][0]["node"]["select_list"]):
        called = node.get("function_name", "")
        if node["class"] not in _NODES or (node["class"] == "FUNCTION" and called not in FUNCTIONS):
            what = called + "()" if called else node["class"].lower()
            raise ValueError(f"{where!r} uses {what}; allowed: comparisons, and {', '.join(sorted(FUNCTIONS))}")
        if node["class"] == "COLUMN_REF":
            columns.add(node["column_names"][0])
    if not columns:
        raise ValueError(f"{where!r} reads no column")
    return tuple(sorted(columns))


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every expression within a parsed statement."""
    if isinstance(value, dict):
        if "class" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)


def fits(value: Any, kind: Type) -> bool:
    """Whether a value of a JSON row can stand in a column of that type; one that is missing or null can."""
    if value is None:
        return True
    if kind != "JSON" and (not isinstance(value, _PYTHON[kind]) or isinstance(value, bool) != (kind == "BOOLEAN")):
        return False
    try:
        _cell(value, kind)
    except (ValueError, OverflowError, RecursionError):
        return False
    return kind != "BIGINT" or -(2**63) <= value < 2**63


def _cell(value: Any, kind: Type) -> Any:
    if value is None or kind in ("BIGINT", "BOOLEAN"):
        return value
    if kind == "DOUBLE":
        return float(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False) if kind == "JSON" else value
    text.encode()  # a lone surrogate out of a JSON escape has no encoding
    return text


def typed(records: list[dict[str, Any]], columns: dict[str, Type]) -> pa.Table:
    """The named columns of JSON rows, all of which fit."""
    return pa.table(
        {
            name: pa.array([_cell(record.get(name), kind) for record in records], _ARROW[kind])
            for name, kind in columns.items()
        }
    )


class Filter:
    """An expression, applied to the rows of one file part by part. `name`: the file's, for errors.

    columns: those that are JSON are told so; others have the type that they have in the rows.
    """

    def __init__(self, name: str, where: str, columns: dict[str, Type]) -> None:
        self._name, self._where = name, where
        self._json = [f"{_quoted(c)}::JSON as {_quoted(c)}" for c, kind in columns.items() if kind == "JSON"]
        self._connection = _connection()  # which takes as long as some thousand rows

    def __call__(self, rows: pa.Table) -> list[bool]:
        """For each of the rows, in order, whether the expression is true. UsageError if it does not fit them."""
        try:
            table = self._connection.from_arrow(rows)
            if self._json:
                table = table.project(f"* replace ({', '.join(self._json)})")
            kept = table.project(duckdb.SQLExpression(self._where).alias("kept"))
            if str(kept.types[0]) != "BOOLEAN":
                raise UsageError(f"{self._name}: the filter {self._where!r} gives {kept.types[0]}, not true or false")
            return [found is True for (found,) in kept.fetchall()]
        except (duckdb.Error, pa.ArrowException) as error:
            raise UsageError(
                f"{self._name}: the filter {self._where!r} cannot be applied: {error}",
                cause="a column of another type than the filter takes it for",
                next_step="correct where in the recipe; try_cast(column as type) is NULL where the value does not fit",
            ) from error


def _quoted(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'
