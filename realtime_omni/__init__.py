"""realtime_omni: an interactive realtime session server, and the in-process SessionManager API."""
