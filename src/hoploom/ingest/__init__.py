"""Getting data in: from tensors, from PyG, from tables, from archives, or made up."""
