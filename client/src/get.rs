//! Get: locate under a lease, read from a replica, verify, fail over.
