"""Pictures of requests: where they may come from, fetched and read beside the event loop."""
