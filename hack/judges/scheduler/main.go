// SPDX-License-Identifier: Apache-2.0

// Scheduler answers for one node what kube-scheduler 1.37 would allocate: upstream's own allocator behind lines of JSON.
//
// A question a line on stdin, an answer a line on stdout, in the same order:
//
//	{"load": {"slices": [ResourceSlice], "classes": [DeviceClass]}}   the node, in the place of one that was loaded before
//	  {"devices": 8}
//	{"fit": ResourceClaim, "held": ["gpu-0000-1b-00-0"]}              what a claim gets while others hold these devices
//	  {"results": [{"request": "gpu", "driver": "…", "pool": "…", "device": "…"}]}, or {"results": null} where it does not fit;
//	  of a share also {"shareID": "…", "consumed": {"memory": "20Gi"}}
//	{"attempt": [ResourceClaim], "held": […], "limit": 10}            what a pod with these claims gets, and what the search cost;
//	                                                                  limit: seconds after which it is given up, as by filterTimeout
//	  {"results": [[{"request": …}]], "steps": 3, "seconds": 0.001, "over": false}
//
// Both may say what others have of shared devices: "shares": [{"device": "…", "shareID": "…", "consumed": {"memory": "20Gi"}}].
//
// Objects are as the API server stores them, so with its defaults. What cannot be answered gives {"error": "…"}. Features are
// those that are on by default in 1.37 (AllocatorFeatures in the scheduler's dynamicresources.go, with the defaults of
// kube_features.go): with them NewAllocator picks the implementation that it calls incubating.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"runtime"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

const maxLine = 64 << 20

var features = structured.Features{
	AdminAccess:            true,
	ConsumableCapacity:     true,
	DeviceBindingAndStatus: true,
	DeviceTaints:           true,
	PartitionableDevices:   true,
	PrioritizedList:        true,
}

type question struct {
	Load    *load                        `json:"load"`
	Fit     *resourceapi.ResourceClaim   `json:"fit"`
	Attempt []*resourceapi.ResourceClaim `json:"attempt"`
	Held    []string                     `json:"held"`
	Shares  []share                      `json:"shares"`
	Limit   float64                      `json:"limit"`
}

type load struct {
	Slices  []*resourceapi.ResourceSlice `json:"slices"`
	Classes classes                      `json:"classes"`
}

// consumed is what a share takes of each capacity of its device.
type consumed map[resourceapi.QualifiedName]resource.Quantity

type share struct {
	Device   string    `json:"device"`
	ShareID  types.UID `json:"shareID"`
	Consumed consumed  `json:"consumed"`
}

type result struct {
	Request  string     `json:"request"`
	Driver   string     `json:"driver"`
	Pool     string     `json:"pool"`
	Device   string     `json:"device"`
	ShareID  *types.UID `json:"shareID,omitempty"`
	Consumed consumed   `json:"consumed,omitempty"`
}

// held is what others have.
type held struct {
	devices []string
	shares  []share
}

// tried is what came of an attempt. Steps is how many times the search looked for one more device, Seconds the time that its thread
// was on a processor, which is what it takes on a machine that has nothing else to do.
type tried struct {
	Results [][]result `json:"results"`
	Steps   int64      `json:"steps"`
	Seconds float64    `json:"seconds"`
	Over    bool       `json:"over"`
}

// classes is what the allocator asks for DeviceClasses.
type classes []*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("there is no DeviceClass %s", name)
}

// node is the one node that is asked about.
type node struct {
	object  *v1.Node
	slices  []*resourceapi.ResourceSlice
	classes classes
	devices map[string]structured.DeviceID
	cel     *cel.Cache
}

func main() {
	if err := serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "scheduler:", err)
		os.Exit(1)
	}
}

func serve(in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 1<<16), maxLine)
	writer := bufio.NewWriter(out)
	answers := json.NewEncoder(writer)
	// As the scheduler's: the ten last expressions stay compiled.
	current := &node{cel: cel.NewCache(10, cel.Features{EnableConsumableCapacity: true})}
	for lines.Scan() {
		answer, err := current.answer(lines.Bytes())
		if err != nil {
			answer = map[string]string{"error": err.Error()}
		}
		if err := answers.Encode(answer); err != nil {
			return err
		}
		if err := writer.Flush(); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (n *node) answer(line []byte) (any, error) {
	var asked question
	decoder := json.NewDecoder(bytes.NewReader(line))
	// A field that the API does not have would be dropped by the server, and the answer would be to another question.
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&asked); err != nil {
		return nil, err
	}
	switch {
	case asked.Load != nil:
		return n.load(asked.Load)
	case asked.Fit != nil:
		return n.fit(asked.Fit, held{asked.Held, asked.Shares})
	case asked.Attempt != nil:
		return n.attempt(asked.Attempt, held{asked.Held, asked.Shares}, asked.Limit)
	}
	return nil, errors.New("load, fit or attempt is needed")
}

func (n *node) load(given *load) (any, error) {
	name := ""
	devices := make(map[string]structured.DeviceID)
	for _, slice := range given.Slices {
		if slice.Spec.NodeName == nil || (name != "" && *slice.Spec.NodeName != name) {
			return nil, fmt.Errorf("slice %s: all slices must be of one node, by nodeName", slice.Name)
		}
		name = *slice.Spec.NodeName
		for _, device := range slice.Spec.Devices {
			devices[device.Name] = structured.MakeDeviceID(slice.Spec.Driver, slice.Spec.Pool.Name, device.Name)
		}
	}
	n.object = &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.slices, n.classes, n.devices = given.Slices, given.Classes, devices
	return map[string]int{"devices": len(devices)}, nil
}

func (n *node) fit(claim *resourceapi.ResourceClaim, taken held) (any, error) {
	found, err := n.attempt([]*resourceapi.ResourceClaim{claim}, taken, 0)
	if err != nil {
		return nil, err
	}
	if len(found.Results) == 0 {
		return map[string][]result{"results": nil}, nil
	}
	return map[string][]result{"results": found.Results[0]}, nil
}

// attempt is one attempt of the scheduler to place a pod with these claims on the node: a new allocator, as PreFilter makes it, and
// one search, as Filter has it done. A limit of 0 is none.
func (n *node) attempt(claims []*resourceapi.ResourceClaim, taken held, limit float64) (*tried, error) {
	state, err := n.state(taken)
	if err != nil {
		return nil, err
	}
	if n.object == nil {
		return nil, errors.New("nothing is loaded")
	}
	ctx := context.Background()
	if limit > 0 {
		limited, cancel := context.WithTimeout(ctx, time.Duration(limit*float64(time.Second)))
		defer cancel()
		ctx = limited
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := processorTime()
	allocator, err := structured.NewAllocator(ctx, features, *state, n.classes, n.slices, n.cel)
	if err != nil {
		return nil, err
	}
	found, err := allocator.Allocate(ctx, n.object, claims)
	answer := &tried{Seconds: (processorTime() - began).Seconds(), Over: errors.Is(err, context.DeadlineExceeded)}
	if err != nil && !answer.Over {
		return nil, err
	}
	answer.Steps = steps(allocator)
	for _, allocated := range found {
		results := make([]result, 0, len(allocated.Devices.Results))
		for _, device := range allocated.Devices.Results {
			results = append(results, result{
				device.Request, device.Driver, device.Pool, device.Device, device.ShareID, device.ConsumedCapacity,
			})
		}
		answer.Results = append(answer.Results, results)
	}
	return answer, nil
}

// state is how the scheduler's informers would have it: a shared device is not taken, but what its shares consume is.
func (n *node) state(taken held) (*structured.AllocatedState, error) {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, name := range taken.devices {
		device, known := n.devices[name]
		if !known {
			return nil, fmt.Errorf("there is no device %s", name)
		}
		state.AllocatedDevices.Insert(device)
	}
	for _, share := range taken.shares {
		device, known := n.devices[share.Device]
		if !known {
			return nil, fmt.Errorf("there is no device %s", share.Device)
		}
		state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(device, &share.ShareID))
		state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(device, share.Consumed))
	}
	return &state, nil
}

// steps reads GetStats of an allocator, whose result has a type that packages outside cannot spell.
func steps(allocator structured.Allocator) int64 {
	stats := reflect.ValueOf(allocator).MethodByName("GetStats")
	if !stats.IsValid() {
		return 0
	}
	return stats.Call(nil)[0].FieldByName("NumAllocateOneInvocations").Int()
}

// processorTime is that of the calling thread.
func processorTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_THREAD, &usage); err != nil {
		panic(err) // the kernel knows this question since 2.6.26
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
