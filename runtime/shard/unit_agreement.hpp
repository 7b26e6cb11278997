// Whether all ranks have made the same units: looked at before anything else of them is collective.
// Each is collective over the mesh of the units, and all ranks get the same answer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/mesh.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::shard {

class Unit;

// The unit `name` lies under a root on `of_root`. Not collective.
// Throws: ContractError for another mesh, whose collectives would have an order of their own.
void expect_one_mesh(const std::string& name, const DeviceMesh& mesh, const DeviceMesh& of_root);
// `units`, in order: those under one root. `changed`: which of them this rank has changed since
// they were laid out; empty where they are new.
// Throws: ContractError, on every rank, where they differ.
void expect_alike(std::span<const std::weak_ptr<Unit>> units, const std::string& changed);
// The largest of all ranks' numbers of a root that they call first.
// Throws: ContractError where several models are alike, and ranks call different ones.
int agree_on_number(const Unit& root, int number);
// The unit of these modules is new. By these calls agree_on_number tells which model is called.
void note_made(const std::shared_ptr<Unit>& unit, const std::vector<nn::Module*>& modules);

// Throws: ContractError where `units` are made otherwise than those of a planned step. Not
// collective.
void expect_as_planned(std::span<const std::weak_ptr<Unit>> units,
                       std::span<const std::weak_ptr<Unit>> planned);
// Throws: ContractError where ranks have planned other steps. `fingerprint`: of this rank's plans.
void expect_same_plans(const DeviceMesh& mesh, std::uint64_t fingerprint);

}  // namespace tessera::shard
