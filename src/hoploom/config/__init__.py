"""Text that people write in TOML or YAML: keys with rules, sections with line numbers, and checked single values."""
