"""The position in the data, of loops that read it through loaders."""
