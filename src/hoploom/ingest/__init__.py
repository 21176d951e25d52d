"""Import graphs into stores: from tables and other tools' folders, or from a generator."""
