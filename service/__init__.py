"""The planning service (HTTP API, job store, workers, web page) has its place here."""
