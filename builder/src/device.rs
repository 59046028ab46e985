//! `--device`: where the engines will run.

use anyhow::{Result, ensure};
use spec_core::engine::Device;
use spec_kernels::ARCHS;

/// The first driver branch that loads the code of NVRTC 13.
const MIN_DRIVER: u32 = 580;

/// Reads `cpu` or `cuda:ARCH[,ARCH...]`.
pub fn parse(text: &str) -> Result<Device> {
    if text == "cpu" {
        return Ok(Device::Cpu);
    }
    let known = ARCHS.join(", ");
    let archs = text.strip_prefix("cuda:").map_or(Vec::new(), |list| list.split(',').collect());
    ensure!(
        !archs.is_empty(),
        "--device {text}: expected `cpu` or `cuda:ARCH[,ARCH...]`, each ARCH one of {known}"
    );
    for (idx, arch) in archs.iter().enumerate() {
        ensure!(
            ARCHS.contains(arch),
            "--device {text}: architecture `{arch}` is not one of {known}"
        );
        ensure!(!archs[..idx].contains(arch), "--device {text}: `{arch}` is there twice");
    }
    let archs = archs.into_iter().map(String::from).collect();
    Ok(Device::Cuda { archs, min_driver: MIN_DRIVER })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_keep_their_order() {
        assert_eq!(parse("cpu").unwrap(), Device::Cpu);
        let archs = vec!["sm_90a".into(), "sm_80".into()];
        assert_eq!(parse("cuda:sm_90a,sm_80").unwrap(), Device::Cuda { archs, min_driver: 580 });
    }

    #[test]
    fn what_is_no_device_is_refused_with_what_would_be() {
        for (text, part) in [
            ("tpu", "expected `cpu` or `cuda:ARCH[,ARCH...]`, each ARCH one of sm_80,"),
            ("cuda", "expected `cpu` or"),
            ("cuda:", "architecture `` is not one of sm_80, sm_89, sm_90a, sm_100a, sm_120a"),
            ("cuda:sm_90", "architecture `sm_90` is not one of"),
            ("cuda:sm_80,sm_80", "`sm_80` is there twice"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(text), "{error}");
        }
    }
}
