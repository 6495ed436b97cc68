"""The language model of the embedded voice: a small llama on our paged KV, int8 on the CPU."""
