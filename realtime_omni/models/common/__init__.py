"""What several models share. Declared shared: every model may import it, and it imports no model."""
