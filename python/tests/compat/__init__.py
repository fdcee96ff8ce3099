"""What Mooncake's store module does, as tests of ours: from its documentation and observed behaviour."""
