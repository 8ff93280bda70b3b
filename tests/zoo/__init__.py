"""The zoo: stock models of many families, each compiled for several meshes and compared with itself on one device (`make zoo`)."""
