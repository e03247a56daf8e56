"""From pinned files to windows: sources, documents, tokenizer, packing, mixture, manifest."""
