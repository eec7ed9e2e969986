"""The file formats of conversations: one module each, with `read` (a record to a draft) and `write` (a tree to a record)."""
