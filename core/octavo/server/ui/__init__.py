"""The page at /ui: a chat, and a look at how paging behaves."""
