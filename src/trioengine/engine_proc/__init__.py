"""The engine process: one synchronous loop. Nothing here imports trio or asyncio."""
