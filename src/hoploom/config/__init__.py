"""Reading of TOML and YAML files: keys with rules, errors with line numbers; parsing and formatting of values."""
