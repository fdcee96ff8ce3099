//! The tcp engine against the conformance suite.

mod support;

tidepool_transport::conformance_suite!(support::TcpFactory);
