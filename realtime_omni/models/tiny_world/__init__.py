"""The embedded world model: small enough for two CPU cores."""
