//! Tests that break real processes and simulated ones, and the drills operators run.
