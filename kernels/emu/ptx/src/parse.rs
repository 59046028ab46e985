//! The text of a kernel: declarations, scopes, labels and statements. What a statement does is for `decode`.

use std::collections::HashMap;

use crate::decode;
use crate::operation::{self, Instruction, Operation, Slot};

/// Where dynamic shared memory begins: what lies below belongs to the system.
pub(crate) const SHARED_START: u64 = 1024;

/// A kernel that can be launched.
#[derive(Debug)]
pub struct Kernel {
    /// Its entry.
    pub name: String,
    pub(crate) code: Vec<Instruction>,
    pub(crate) num_slots: usize,
    pub(crate) params_bytes: usize,
    /// Blocks of a cluster.
    pub(crate) cluster: u32,
}

/// Most blocks of a cluster.
const MOST_BLOCKS: u32 = 16;

/// The text of an entry, in its parts.
struct Entry<'a> {
    name: String,
    params: &'a str,
    /// What stands before the body.
    directives: &'a str,
    body: &'a str,
}

/// Registers of one name and many numbers.
#[derive(Clone, Copy)]
struct Family {
    first: Slot,
    len: u32,
}

/// Names while a text is read.
pub(crate) struct Names {
    scopes: Vec<HashMap<String, Slot>>,
    families: HashMap<String, Family>,
    num_slots: Slot,
    /// Variables, by their addresses in their own space.
    variables: HashMap<String, u64>,
}

impl Kernel {
    /// Reads a text with one entry. The error names the line of what is not supported.
    pub fn parse(text: &str) -> Result<Self, String> {
        let Entry { name, params, directives, body } = entry(text)?;
        let cluster = cluster(directives)?;
        let mut names = Names::new();
        if text.contains(".extern .shared .align 1024 .b8 dynamic_shared_memory[];") {
            names.variables.insert("dynamic_shared_memory".into(), SHARED_START);
        }
        let (param, params_bytes) = param(params)?;
        names.variables.insert(param, 0);
        let first_line = text[..text.len() - body.len()].matches('\n').count() + 1;
        let mut reader =
            Reader { names, code: Vec::new(), labels: HashMap::new(), jumps: Vec::new() };
        for (line, statement) in statements(body, first_line) {
            reader.read(line, &statement).map_err(|e| format!("line {line}: {statement}: {e}"))?;
        }
        for (at, label) in reader.jumps {
            let target = reader.labels.get(&label).ok_or_else(|| format!("no label {label}"))?;
            reader.code[at].operation = Operation::Branch(*target);
        }
        let num_slots = reader.names.num_slots as usize;
        Ok(Self { name, code: reader.code, num_slots, params_bytes, cluster })
    }
}

/// The one entry.
fn entry(text: &str) -> Result<Entry<'_>, String> {
    let (_, rest) = text.split_once(".visible .entry ").ok_or("there is no entry")?;
    if rest.contains(".visible .entry") || rest.contains(".func") {
        return Err("there is more than one function".into());
    }
    let (name, rest) = rest.split_once('(').ok_or("an entry without parameters")?;
    let (params, rest) = rest.split_once(')').ok_or("parameters without an end")?;
    let (directives, body) = rest.split_once('{').ok_or("an entry without a body")?;
    Ok(Entry { name: name.trim().into(), params, directives, body })
}

/// Blocks of a cluster: the first of one to three numbers, of which the others are 1.
fn cluster(directives: &str) -> Result<u32, String> {
    let Some((_, rest)) = directives.split_once(".reqnctapercluster") else {
        let is_open = directives.contains(".explicitcluster");
        return if is_open { Err("clusters without a .reqnctapercluster".into()) } else { Ok(1) };
    };
    let text = rest.split('.').next().unwrap_or_default().trim();
    let numbers = text.split(',').map(|number| number.trim().parse::<u32>());
    let numbers = numbers.collect::<Result<Vec<_>, _>>();
    match numbers.map_err(|e| format!(".reqnctapercluster {text}: {e}"))?[..] {
        [first] | [first, 1] | [first, 1, 1] if (1..=MOST_BLOCKS).contains(&first) => Ok(first),
        _ => Err(format!(".reqnctapercluster {text}, expected 1 to {MOST_BLOCKS} blocks in a row")),
    }
}

/// The one parameter, and its bytes.
fn param(params: &str) -> Result<(String, usize), String> {
    let words = params.split_whitespace().next_back().unwrap_or_default();
    let (name, len) = words.split_once('[').ok_or_else(|| format!("parameters {params}"))?;
    let len = len.trim_end_matches(']').parse().map_err(|e| format!("{params}: {e}"))?;
    Ok((name.into(), len))
}

/// Statements with their lines: what ends in `;`, labels with their `:`, and braces that open and close scopes.
fn statements(body: &str, first_line: usize) -> Vec<(usize, String)> {
    let (mut line, mut found) = (first_line, Vec::new());
    let mut current = String::new();
    for row in body.lines() {
        let code = row.split("//").next().unwrap_or_default();
        for letter in code.chars() {
            let is_empty = current.trim().is_empty();
            match letter {
                '{' | '}' if is_empty => found.push((line, letter.to_string())),
                ';' => found.push((line, std::mem::take(&mut current).trim().into())),
                ':' if current.trim().starts_with('$') && !current.trim().contains(' ') => {
                    found.push((line, std::mem::take(&mut current).trim().to_string() + ":"));
                }
                _ => current.push(letter),
            }
        }
        current.push(' ');
        line += 1;
    }
    found
}

struct Reader {
    names: Names,
    code: Vec<Instruction>,
    labels: HashMap<String, usize>,
    /// Branches whose targets may come later.
    jumps: Vec<(usize, String)>,
}

impl Reader {
    fn read(&mut self, line: usize, statement: &str) -> Result<(), String> {
        match statement {
            "{" => self.names.scopes.push(HashMap::new()),
            "}" => drop(self.names.scopes.pop()),
            _ if statement.starts_with(".pragma") => (),
            _ if statement.starts_with(".reg") => self.names.declare(statement)?,
            _ if statement.starts_with('.') => return Err("is not supported".into()),
            _ => match statement.strip_suffix(':') {
                Some(label) => drop(self.labels.insert(label.into(), self.code.len())),
                None => self.instruction(line, statement)?,
            },
        }
        Ok(())
    }

    fn instruction(&mut self, line: usize, statement: &str) -> Result<(), String> {
        let (guard, rest) = match statement.strip_prefix('@') {
            Some(guarded) => {
                let (name, rest) =
                    guarded.split_once(char::is_whitespace).ok_or("is not supported")?;
                let (name, wanted) = match name.strip_prefix('!') {
                    Some(name) => (name, false),
                    None => (name, true),
                };
                (Some((self.names.slot(name)?, wanted)), rest.trim())
            }
            None => (None, statement),
        };
        let (opcode, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let operation = match opcode {
            "bra" | "bra.uni" => {
                self.jumps.push((self.code.len(), operands.trim().into()));
                Operation::Nothing
            }
            _ => decode::decode(&self.names, opcode, &split(operands))?,
        };
        self.code.push(Instruction { guard, operation, line, text: statement.into() });
        Ok(())
    }
}

/// Operands: what stands between commas that are in no bracket.
fn split(operands: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, letter) in operands.char_indices() {
        match letter {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(operands[start..at].trim());
                start = at + 1;
            }
            _ => (),
        }
    }
    let last = operands[start..].trim();
    parts.extend((!last.is_empty()).then_some(last));
    parts
}

impl Names {
    fn new() -> Self {
        let special = [
            ("%tid.x", operation::THREAD),
            ("%ntid.x", operation::NUM_THREADS),
            ("%ctaid.x", operation::BLOCK),
            ("%nctaid.x", operation::NUM_BLOCKS),
            ("%cluster_ctarank", operation::RANK),
        ];
        let scope = special.map(|(name, slot)| (name.to_string(), slot)).into();
        Self {
            scopes: vec![scope],
            families: HashMap::new(),
            num_slots: operation::FIRST_FREE,
            variables: HashMap::new(),
        }
    }

    /// `.reg .type name` or `.reg .type name<count>`.
    fn declare(&mut self, statement: &str) -> Result<(), String> {
        let names = statement.split_whitespace().skip(2).collect::<String>();
        for name in names.split(',') {
            let len = match name.strip_suffix('>').and_then(|name| name.split_once('<')) {
                Some((prefix, len)) => {
                    let len = len.parse().map_err(|e| format!("{len}: {e}"))?;
                    self.families.insert(prefix.into(), Family { first: self.num_slots, len });
                    len
                }
                None => {
                    let scope = self.scopes.last_mut().ok_or("a scope too many is closed")?;
                    scope.insert(name.into(), self.num_slots);
                    1
                }
            };
            self.num_slots += len;
        }
        Ok(())
    }

    /// The slot of a register.
    pub(crate) fn slot(&self, name: &str) -> Result<Slot, String> {
        if let Some(slot) = self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            return Ok(*slot);
        }
        let prefix = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
        let number = name[prefix.len()..].parse::<u32>().ok();
        let family = self.families.get(prefix);
        match (family, number) {
            (Some(family), Some(number)) if number < family.len => Ok(family.first + number),
            _ => Err(format!("no register is called {name}")),
        }
    }

    /// The address of a variable or a parameter in its own space.
    pub(crate) fn variable(&self, name: &str) -> Option<u64> {
        self.variables.get(name).copied()
    }
}
