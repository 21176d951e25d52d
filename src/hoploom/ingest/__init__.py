"""Import graphs into stores: from tables, archives and other tools' folders, or from a generator."""
