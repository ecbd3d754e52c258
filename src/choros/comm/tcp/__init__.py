"""TCP sockets between hosts, authenticated by the job's secret."""
