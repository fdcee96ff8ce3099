//! The directory and the service around it: leases, liveness, eviction, gRPC, admin.

pub mod directory;
