"""Wire protocols of realtime_omni: messages, frames and sans-I/O machines. Depends on msgspec; `openpi` on numpy too."""
