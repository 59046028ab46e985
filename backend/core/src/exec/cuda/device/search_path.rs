//! Where the libraries of CUDA may be that are loaded when they are needed: compiler and products. The wheels of
//! `pip install nvidia-cuda-nvrtc nvidia-cublas` and a CUDA toolkit are found alike.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Places inside a named folder: the folder itself, a toolkit's, a wheel's.
const WITHIN: [&str; 4] = ["", "lib64", "lib", "nvidia/cu13/lib"];

/// Where `scripts/setup-cuda` installs, beside the folders of cargo's profiles.
const PROJECT_VENV: &str = "cuda/venv";

/// What tells where to look.
#[derive(Clone, Debug, Default)]
pub struct SearchPath {
    /// A folder that the user named: nothing else is looked at.
    pub named: Option<PathBuf>,
    /// `CUDA_HOME` or `CUDA_PATH`: a toolkit.
    pub toolkit: Option<PathBuf>,
    /// `VIRTUAL_ENV`: an active Python environment.
    pub venv: Option<PathBuf>,
    /// The running program: what it was built in may hold an environment.
    pub program: Option<PathBuf>,
}

impl SearchPath {
    /// Those of this process; `option` comes before `SPEC_CUDA_LIB`.
    pub fn of_process(option: Option<&Path>) -> Self {
        let var = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
        let path = |name| var(name).map(PathBuf::from);
        Self {
            named: option.map(Path::to_path_buf).or_else(|| path("SPEC_CUDA_LIB")),
            toolkit: path("CUDA_HOME").or_else(|| path("CUDA_PATH")),
            venv: path("VIRTUAL_ENV"),
            program: std::env::current_exe().ok(),
        }
    }

    /// The first folder that holds a library of this name; `None` leaves it to the loader. The error says that the folder
    /// that the user named does not.
    pub fn folder(&self, library: &str) -> Result<Option<PathBuf>, String> {
        if let Some(named) = &self.named {
            let missing = || format!("{} holds no {library}", named.display());
            return within(named, library).ok_or_else(missing).map(Some);
        }
        let project = self.program.iter().flat_map(|program| program.ancestors().skip(1));
        let project = project.map(|folder| folder.join(PROJECT_VENV));
        let venvs = self.venv.iter().cloned().chain(project).flat_map(site_packages);
        let standard = PathBuf::from("/usr/local/cuda");
        let folders = self.toolkit.iter().cloned().chain(venvs).chain([standard]);
        Ok(folders.into_iter().find_map(|folder| within(&folder, library)))
    }
}

fn within(folder: &Path, library: &str) -> Option<PathBuf> {
    WITHIN.iter().map(|part| folder.join(part)).find(|folder| folder.join(library).is_file())
}

/// The package folders of a Python environment.
fn site_packages(venv: PathBuf) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(venv.join("lib")) else { return Vec::new() };
    let mut folders: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path().join("site-packages")).collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const LIBRARY: &str = "libnvrtc.so.13";

    fn library_in(folder: &Path) -> PathBuf {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(LIBRARY), "").unwrap();
        folder.to_path_buf()
    }

    #[test]
    fn a_named_folder_is_the_only_place() {
        let dir = tempfile::tempdir().unwrap();
        let toolkit = Some(dir.path().join("cuda"));
        library_in(&dir.path().join("cuda/lib64"));
        let lib = library_in(&dir.path().join("wheel/nvidia/cu13/lib"));
        let places = |named: &Path| SearchPath {
            named: Some(named.into()),
            toolkit: toolkit.clone(),
            ..SearchPath::default()
        };
        for named in [&lib, &dir.path().join("wheel")] {
            assert_eq!(places(named).folder(LIBRARY).unwrap().as_deref(), Some(lib.as_path()));
        }
        let error = places(&dir.path().join("empty")).folder(LIBRARY).unwrap_err();
        assert!(error.ends_with("empty holds no libnvrtc.so.13"), "{error}");
        let error = places(&lib).folder("libcublasLt.so.13").unwrap_err();
        assert!(error.ends_with("holds no libcublasLt.so.13"), "{error}");
    }

    #[test]
    fn the_toolkit_comes_before_environments_and_the_active_one_before_the_projects() {
        let dir = tempfile::tempdir().unwrap();
        let site = "lib/python3.11/site-packages/nvidia/cu13/lib";
        let project = library_in(&dir.path().join("target/cuda/venv").join(site));
        let mut places = SearchPath {
            program: Some(dir.path().join("target/debug/deps/test")),
            ..SearchPath::default()
        };
        assert_eq!(places.folder(LIBRARY).unwrap(), Some(project));
        let active = library_in(&dir.path().join("active").join(site));
        places.venv = Some(dir.path().join("active"));
        assert_eq!(places.folder(LIBRARY).unwrap(), Some(active));
        let toolkit = library_in(&dir.path().join("cuda/lib64"));
        places.toolkit = Some(dir.path().join("cuda"));
        assert_eq!(places.folder(LIBRARY).unwrap(), Some(toolkit));
    }
}
