"""Adapters to inference runtimes, one module each, by name (`names`), imported when opened (`adapters`)."""
