"""Parts of the voice that answer over HTTP, in OpenAI's language: speech to text, chat, text to speech."""
