//! On which processors threads may run.
#![allow(unsafe_code)]

/// Processors that a mask can name: eight times what kernels are built for.
const MAX_CPUS: usize = 64 << 10;

/// A set of processors, as the system takes it.
type Mask = [u64; MAX_CPUS / 64];

/// A thread of this process, as the system counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThreadId(libc::pid_t);

impl ThreadId {
    pub(crate) fn current() -> Self {
        // SAFETY: takes nothing and cannot fail.
        Self(unsafe { libc::gettid() })
    }

    /// Processors that the thread may run on, ascending. `None` where the system does not say, or the thread is gone.
    pub(crate) fn cpus(self) -> Option<Vec<usize>> {
        let mut mask: Mask = [0; MAX_CPUS / 64];
        // SAFETY: the system writes at most as many bytes as the mask has.
        let status =
            unsafe { libc::sched_getaffinity(self.0, size_of::<Mask>(), (&raw mut mask).cast()) };
        let is_set = |&cpu: &usize| mask[cpu / 64] >> (cpu % 64) & 1 == 1;
        (status == 0).then(|| (0..MAX_CPUS).filter(is_set).collect())
    }

    /// Lets the thread run on these processors only; tells whether the system agreed.
    pub(crate) fn bind(self, cpus: &[usize]) -> bool {
        let mut mask: Mask = [0; MAX_CPUS / 64];
        for &cpu in cpus.iter().filter(|&&cpu| cpu < MAX_CPUS) {
            mask[cpu / 64] |= 1 << (cpu % 64);
        }
        // SAFETY: the system reads at most as many bytes as the mask has.
        unsafe { libc::sched_setaffinity(self.0, size_of::<Mask>(), (&raw const mask).cast()) == 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_bound_and_let_go() {
        std::thread::spawn(|| {
            let thread = ThreadId::current();
            let all = thread.cpus().unwrap();
            assert!(!all.is_empty() && all.is_sorted());
            let last = &all[all.len() - 1..];
            assert!(thread.bind(last));
            assert_eq!(thread.cpus().unwrap(), last);
            assert!(!thread.bind(&[]), "nowhere to run");
            assert!(thread.bind(&all));
            assert_eq!(thread.cpus().unwrap(), all);
        })
        .join()
        .unwrap();
    }
}
