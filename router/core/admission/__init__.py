"""Choose which queued request is served next, and how; attach, drain and lose backends."""
