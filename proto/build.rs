//! Compiles the .proto files with protox, so that no `protoc` is needed to build.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files =
        ["types", "client", "node", "raft", "admin", "data"].map(|name| format!("proto/tidepool/v1/{name}.proto"));
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
