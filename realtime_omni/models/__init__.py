"""Models: the contract they meet, the catalog, and one folder per model."""
