//! Rust client: two-phase put, leased get, leader discovery, retries, deadlines.
