"""Memory that master and workers share, and the sockets that hand it over."""
