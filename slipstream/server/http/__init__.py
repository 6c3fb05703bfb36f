"""HTTP/1.1 on an event loop, with every client bounded in time, memory and connections. Knows no routes."""
