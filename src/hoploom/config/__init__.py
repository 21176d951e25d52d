"""What people write in TOML or YAML: keys with their rules, sections read with line numbers, single values checked."""
