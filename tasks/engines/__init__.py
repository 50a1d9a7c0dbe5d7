"""The ways to run the target model: vLLM in a process of its own, a server over HTTP, and Hugging Face."""
