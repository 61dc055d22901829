"""The OpenAI-compatible API: validates requests, drives Route Sessions, streams answers."""
