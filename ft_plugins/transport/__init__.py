"""Everything on a socket: connections that are authenticated by the job's secret."""
