"""What all files that people write in TOML share: keys and their rules, where each key stands, text from values."""
