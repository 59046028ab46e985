//! `libtriton_echo.so`: answers a request with its inputs, the first one that config.pbtxt declares as the first output,
//! and so on. The parameter `max_elements` bounds a request; the metric `echo_elements_total` counts what was sent back.

use std::{collections::HashMap, sync::Arc};
use triton_backend::{
    Backend, Error, Family, Instance, Kind, Level, Metric, Model, Request, Result, Tensor, Times,
    log, monotonic_ns,
};

struct Echo;

struct Settings {
    /// The output that an input becomes.
    outputs: HashMap<String, String>,
    max_elements: usize,
    echoed: Metric,
}

impl Backend for Echo {
    type Model = Settings;
    type Instance = (Arc<Settings>, Instance);

    fn load(model: &Model<'_>) -> Result<Settings> {
        let (name, config) = (model.name()?, model.config()?);
        let names = |of: &str| {
            let tensors = config[of].as_array().into_iter().flatten();
            tensors.filter_map(|one| one["name"].as_str().map(String::from))
        };
        let max = config["parameters"]["max_elements"]["string_value"].as_str().unwrap_or("1000");
        let refusal = |_| Error::invalid_arg(format!("parameter 'max_elements' is '{max}'"));
        let max_elements = max.parse().map_err(refusal)?;
        let family = Family::new(Kind::Counter, "echo_elements_total", "Elements sent back")?;
        let echoed = family.metric(&[("model", &name)])?;
        log(Level::Info, &format!("model '{name}' echoes up to {max_elements} elements"));
        Ok(Settings {
            outputs: names("input").zip(names("output")).collect(),
            max_elements,
            echoed,
        })
    }

    fn start(settings: &Arc<Settings>, instance: Instance) -> Result<Self::Instance> {
        Ok((Arc::clone(settings), instance))
    }

    fn execute((settings, instance): &Self::Instance, requests: Vec<Request>) {
        for mut request in requests {
            let start = monotonic_ns();
            let sent = echo(settings, &request).and_then(|tensors| request.send(&tensors, true));
            if let Err(error) = &sent {
                request.fail(error);
            }
            let end = monotonic_ns();
            let times =
                Times { exec_start: start, compute_start: start, compute_end: end, exec_end: end };
            let _ = instance.report(&request, sent.is_ok(), times);
        }
    }
}

/// The inputs as those outputs that the client wants.
fn echo(settings: &Settings, request: &Request) -> Result<Vec<Tensor>> {
    let (mut tensors, wanted) = (request.inputs()?, request.wanted_outputs()?);
    for tensor in &mut tensors {
        tensor.name = settings.outputs.get(&tensor.name).cloned().unwrap_or_default();
    }
    tensors.retain(|tensor| wanted.contains(&tensor.name));
    let count = tensors.iter().map(Tensor::num_elements).sum::<Result<usize>>()?;
    if count > settings.max_elements {
        let max = settings.max_elements;
        return Err(Error::invalid_arg(format!("{count} elements, max_elements is {max}")));
    }
    settings.echoed.add(count as f64);
    Ok(tensors)
}

triton_backend::export_backend!(Echo);
