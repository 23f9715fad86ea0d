//! The options of a run: the JSON object of the options file or of the input's `__metadata__`.

use headwise::Level;
use serde::Deserialize;
use serde_json::Value;

use crate::run::RunError;

/// What the JSON object may hold; every key is optional.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Options {
    pub layout: Layout,
    pub scale: Option<f32>,
    pub softcap: Option<f32>,
    pub causal: bool,
    /// Left and right.
    pub window: Option<[Option<usize>; 2]>,
    pub position: Position,
    pub threads: Option<usize>,
    pub level: Option<String>,
    pub precision: Option<Precision>,
    pub lse: bool,
    pub scores: Option<Stage>,
    pub stats: bool,
    pub reference: bool,
}

/// The order of the axes of `q`, `k`, `v` and `out`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Layout {
    #[default]
    Bhld,
    Blhd,
}

/// Where the queries stand, unless the input has `offsets`.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged, expecting = "must be \"top_left\", \"bottom_right\" or an integer")]
pub(crate) enum Position {
    Corner(Corner),
    At(i64),
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Corner {
    TopLeft,
    BottomRight,
}

impl Default for Position {
    fn default() -> Self {
        Self::Corner(Corner::BottomRight)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Precision {
    Exact,
    Fast,
}

impl From<Precision> for headwise::Precision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::Exact => Self::Exact,
            Precision::Fast => Self::Fast,
        }
    }
}

/// Which matrix of scores is asked for.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Stage {
    Scaled,
    Capped,
    Biased,
    Weights,
}

impl From<Stage> for headwise::Stage {
    fn from(stage: Stage) -> Self {
        match stage {
            Stage::Scaled => Self::Scaled,
            Stage::Capped => Self::Capped,
            Stage::Biased => Self::Biased,
            Stage::Weights => Self::Weights,
        }
    }
}

/// More threads than any machine has cores are a slip of the pen, and the system may refuse them anyhow.
pub(crate) const MAX_THREADS: usize = 1024;

impl Options {
    /// Reads the JSON; an error names the key at fault.
    pub fn parse(json: &str) -> Result<Self, RunError> {
        if !json.trim_start().starts_with('{') {
            return Err(RunError::Options("must be a JSON object".into())); // serde would take a list, too
        }
        let options: Self = serde_json::from_str(json).map_err(|error| name_the_key(json, &error))?;
        match options.threads {
            Some(threads) if !(1..=MAX_THREADS).contains(&threads) => {
                Err(RunError::Options(format!("threads is {threads}, must be 1 to {MAX_THREADS}")))
            }
            _ => Ok(options),
        }
    }

    /// The level by its name.
    pub fn level(&self) -> Result<Option<Level>, RunError> {
        Ok(self.level.as_deref().map(str::parse).transpose()?)
    }
}

/// For a wrong type serde tells the column but not the key: try the keys one by one.
fn name_the_key(json: &str, error: &serde_json::Error) -> RunError {
    if let Ok(Value::Object(options)) = serde_json::from_str(json) {
        for (key, value) in options {
            let alone = Value::Object([(key.clone(), value)].into_iter().collect());
            match serde_json::from_value::<Options>(alone) {
                Err(error) if error.to_string().starts_with("unknown field") => {
                    return RunError::Options(error.to_string());
                }
                Err(error) => return RunError::Options(format!("{key}: {error}")),
                Ok(_) => {}
            }
        }
    }
    RunError::Options(error.to_string())
}
