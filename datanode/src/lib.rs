//! Segments, payload server, registration and fencing.
