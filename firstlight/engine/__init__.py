"""The engine: requests in, tokens out; offline, streamed, or shared by coroutines."""
