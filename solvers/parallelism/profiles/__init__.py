"""Search over pipelines by measured layer profiles."""
