"""The HTTP server: TGI's routes and OpenAI's, in front of an engine in another process."""
