"""The router's own routes: state, plans, snapshots, requests, drain, reload, the live page."""
