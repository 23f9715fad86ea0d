//! Files that are written whole or not at all: a new one beside the old takes its place when complete.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file to come. Its place is tried when it is created, so that long work is not done for nothing.
#[derive(Debug)]
pub(crate) struct NewFile {
    path: PathBuf,
    beside: PathBuf,
    file: File,
}

impl NewFile {
    /// Creates the new file, empty, under a name of its own. It may not take the place of an input.
    pub fn create(path: &Path, inputs: &[&Path]) -> io::Result<Self> {
        if let Ok(place) = path.canonicalize()
            && inputs.iter().any(|input| input.canonicalize().is_ok_and(|input| input == place))
        {
            return Err(io::Error::other("it is an input of this command"));
        }
        if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
            return Err(io::Error::other("it exists and is not a regular file"));
        }
        let name = path.file_name().ok_or_else(|| io::Error::other("it does not name a file"))?;
        let beside = path.with_file_name(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
        let file = File::create(&beside)?;
        Ok(Self { path: path.to_path_buf(), beside, file })
    }

    /// Fills it and gives it its name.
    pub fn finish(mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        fs::rename(&self.beside, &self.path)
    }

    /// The name that it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.beside); // it is gone if it has its name
    }
}
