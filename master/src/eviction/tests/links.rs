//! What must hold of the links of `Adaptive` after any event.

use super::super::resident::NONE;
use super::{ASIDE, Adaptive, CLASS, EXPECTED, HOLLOW};
use std::collections::BTreeMap;

impl Adaptive {
    /// Panics if a link is wrong.
    pub fn check(&self) {
        let slots = self.residents.slots();
        let mut places: BTreeMap<u32, u32> = BTreeMap::new();
        for (class, list, is_marked) in self.cells.all() {
            assert_eq!(is_marked, !list.is_empty(), "cells are marked as they are");
            for slot in self.residents.listed(list) {
                let entry = self.residents.at(slot);
                assert_eq!(
                    (entry.tag & !EXPECTED, entry.children),
                    (class, 0),
                    "a cell holds blocks of its class without children"
                );
                *places.entry(slot).or_default() += 1;
            }
        }
        for slot in self.residents.listed(self.aside) {
            assert_eq!(self.residents.at(slot).tag & !(CLASS | EXPECTED), ASIDE, "put off, and known to be");
            *places.entry(slot).or_default() += 1;
        }
        let mut children: BTreeMap<u32, u32> = BTreeMap::new();
        let mut above: Vec<u32> = slots.clone();
        let mut hollow = Vec::new();
        while let Some(slot) = above.pop() {
            let parent = self.residents.at(slot).parent;
            if parent == NONE {
                continue;
            }
            *children.entry(parent).or_default() += 1;
            assert!(self.residents.at(parent).depth < self.residents.at(slot).depth, "a parent is less deep");
            if self.residents.at(parent).tag == HOLLOW && !hollow.contains(&parent) {
                hollow.push(parent);
                above.push(parent);
            }
        }
        for &slot in slots.iter().chain(&hollow) {
            let counted = children.get(&slot).copied().unwrap_or(0);
            assert_eq!(u32::from(self.residents.at(slot).children), counted, "children are counted");
        }
        for slot in &slots {
            let entry = self.residents.at(*slot);
            let is_listed = entry.tag & ASIDE != 0 || entry.children == 0;
            assert_eq!(places.remove(slot), is_listed.then_some(1), "in one list, or above a child");
        }
        assert!(places.is_empty(), "what is listed is resident");
    }
}
