//! Where snapshots are published: one URL.
//!
//! `file:///path`, or `s3://bucket/prefix?endpoint=http://host:port&region=name`. Credentials are never in the URL: they
//! come from the usual `AWS_*` environment variables.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use tidepool_proto::ClusterId;
use url::Url;

use super::layout;
use super::local::LocalStore;
use super::s3::S3Store;
use super::store::{Store, StoreError};

/// A place for snapshots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Location {
    /// A directory: of this host, or a file system that several hosts have mounted.
    Directory(PathBuf),
    /// A bucket of an S3-compatible store.
    S3(Bucket),
}

/// A bucket and what is needed to reach it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Bucket {
    /// Its name.
    pub name: String,
    /// What every key begins with; empty or without a slash at either end.
    pub prefix: String,
    /// Where the store answers; without it, where AWS does in the region.
    pub endpoint: Option<String>,
    /// Region; without it, `AWS_REGION`, else us-east-1.
    pub region: Option<String>,
}

/// A URL that names no place for snapshots.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "'{url}' is no place for snapshots: {why}; write file:///path or s3://bucket/prefix?endpoint=http://host:port&region=name"
)]
pub struct LocationError {
    /// As given, without a password.
    pub url: String,
    /// What is wrong.
    pub why: String,
}

impl Location {
    /// Connects to it, without asking it anything yet. Calls of the store block; an S3 store must not be called, nor
    /// dropped, on a thread of an async runtime.
    pub fn store(&self) -> Result<Arc<dyn Store>, StoreError> {
        Ok(match self {
            Location::Directory(path) => Arc::new(LocalStore::new(path.clone())),
            Location::S3(bucket) => Arc::new(S3Store::new(bucket, &self.to_string())?),
        })
    }

    /// A URL may name one cluster's directory in a place: that place, and the cluster.
    pub(super) fn split_cluster(&self) -> (Location, Option<ClusterId>) {
        let whole = (self.clone(), None);
        match self {
            Location::Directory(path) => {
                let name = path.file_name().and_then(|name| name.to_str());
                match (name.and_then(layout::parse_cluster), path.parent()) {
                    (Some(cluster), Some(parent)) => (Location::Directory(parent.to_owned()), Some(cluster)),
                    _ => whole,
                }
            }
            Location::S3(bucket) => {
                let (parent, name) = bucket.prefix.rsplit_once('/').unwrap_or(("", &bucket.prefix));
                match layout::parse_cluster(name) {
                    Some(cluster) => {
                        let prefix = parent.to_owned();
                        (Location::S3(Bucket { prefix, ..bucket.clone() }), Some(cluster))
                    }
                    None => whole,
                }
            }
        }
    }

    /// Whether it names one cluster's directory, which is for reading only.
    pub fn names_a_cluster(&self) -> bool {
        self.split_cluster().1.is_some()
    }
}

impl FromStr for Location {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Location, LocationError> {
        let wrong = |why: &str| LocationError { url: text.to_owned(), why: why.to_owned() };
        let mut url = Url::parse(text).map_err(|error| wrong(&error.to_string()))?;
        if url.password().is_some() || !url.username().is_empty() {
            // The password must not reach a log.
            let _ = (url.set_password(None), url.set_username(""));
            let why = "credentials do not belong into it; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY".to_owned();
            return Err(LocationError { url: url.to_string(), why });
        }
        match url.scheme() {
            "file" => {
                if url.query().is_some() || url.fragment().is_some() {
                    return Err(wrong("a file URL takes no parameters"));
                }
                let path = url.to_file_path().map_err(|()| wrong("a file URL has an absolute path and no host"))?;
                let plain: PathBuf = path.components().collect();
                Ok(Location::Directory(plain))
            }
            "s3" => bucket(&url).map(Location::S3).map_err(|why| wrong(&why)),
            other => Err(wrong(&format!("the scheme '{other}' is not known"))),
        }
    }
}

fn bucket(url: &Url) -> Result<Bucket, String> {
    let name = url.host_str().filter(|name| !name.is_empty()).ok_or("it names no bucket")?;
    if url.port().is_some() || url.fragment().is_some() {
        return Err("a bucket has no port; the store's address is the parameter endpoint".to_owned());
    }
    let prefix = url.path().split('/').filter(|name| !name.is_empty()).collect::<Vec<_>>().join("/");
    if prefix.contains('%') {
        return Err("the prefix may only have characters that need no escaping".to_owned());
    }
    let mut bucket = Bucket { name: name.to_owned(), prefix, ..Bucket::default() };
    for (key, value) in url.query_pairs() {
        match &*key {
            "endpoint" => {
                let endpoint = Url::parse(&value).map_err(|error| format!("endpoint: {error}"))?;
                if !matches!(endpoint.scheme(), "http" | "https") || endpoint.host_str().is_none() {
                    return Err("endpoint must be http://host:port or https://host:port".to_owned());
                }
                bucket.endpoint = Some(value.trim_end_matches('/').to_owned());
            }
            "region" => bucket.region = Some(value.into_owned()),
            other => return Err(format!("parameter '{other}' is not known; known are endpoint and region")),
        }
    }
    Ok(bucket)
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Directory(path) => match Url::from_file_path(path) {
                Ok(url) => write!(f, "{url}"),
                Err(()) => write!(f, "file://{}", path.display()),
            },
            Location::S3(bucket) => {
                write!(f, "s3://{}", bucket.name)?;
                if !bucket.prefix.is_empty() {
                    write!(f, "/{}", bucket.prefix)?;
                }
                let parameters = [("endpoint", &bucket.endpoint), ("region", &bucket.region)];
                let set = parameters.into_iter().filter_map(|(key, value)| Some((key, value.as_deref()?)));
                for (at, (key, value)) in set.enumerate() {
                    write!(f, "{}{key}={value}", if at == 0 { '?' } else { '&' })?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_written() {
        for text in [
            "file:///var/backups/tidepool",
            "s3://bucket",
            "s3://bucket/a/b",
            "s3://bucket/a?endpoint=http://127.0.0.1:9000&region=eu-1",
        ] {
            assert_eq!(text.parse::<Location>().unwrap().to_string(), text);
        }
        assert_eq!("s3://bucket/a//b/".parse::<Location>().unwrap().to_string(), "s3://bucket/a/b");
        assert_eq!("file:///a/b/".parse::<Location>().unwrap(), Location::Directory("/a/b".into()));
    }

    #[test]
    fn what_names_no_place_is_refused_with_the_form_to_use() {
        for text in [
            "",
            "/var/backups",
            "var",
            "file://host/path",
            "file:///a?x=1",
            "s3://",
            "s3:///a",
            "http://h/x",
            "s3://b:1/x",
            "s3://b/x?end=http://h",
            "s3://b/x?endpoint=h:1",
            "s3://b/x?endpoint=ftp://h",
            "s3://b/ä",
        ] {
            let error = text.parse::<Location>().unwrap_err().to_string();
            assert!(error.contains("file:///path"), "{error}");
        }
        let error = "s3://key:secret@bucket/x".parse::<Location>().unwrap_err().to_string();
        assert!(error.contains("AWS_SECRET_ACCESS_KEY") && !error.contains(":secret"), "{error}");
    }

    #[test]
    fn a_clusters_directory_is_known_by_its_name() {
        let cluster = "00112233445566778899aabbccddeeff";
        for place in ["file:///a", "s3://b/p", "s3://b"] {
            let location: Location = format!("{place}/{cluster}").parse().unwrap();
            let (parent, found) = location.split_cluster();
            assert_eq!((parent.to_string().as_str(), found), (place, layout::parse_cluster(cluster)));
            assert!(!parent.names_a_cluster());
        }
    }
}
