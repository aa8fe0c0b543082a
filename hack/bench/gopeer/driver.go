// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
)

const deviceCount = 8

// driver answers the helper. The helper calls it one RPC at a time (its default), so nothing here locks.
type driver struct {
	name  string
	state *state
}

var _ kubeletplugin.DRAPlugin = &driver{}

func resources(pool string) resourceslice.DriverResources {
	devices := make([]resourceapi.Device, 0, deviceCount)
	for index := range deviceCount {
		devices = append(devices, resourceapi.Device{
			Name: fmt.Sprintf("gpu-%d", index),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"type":        {StringValue: ptr.To("gpu")},
				"productName": {StringValue: ptr.To("A whole GPU that is not there")},
				"uuid":        {StringValue: ptr.To(fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", index))},
				"index":       {IntValue: ptr.To(int64(index))},
			},
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
				"memory": {Value: resource.MustParse("80Gi")},
			},
		})
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		pool: {Slices: []resourceslice.Slice{{Devices: devices}}},
	}}
}

func (d *driver) PrepareResourceClaims(
	_ context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		devices, err := d.prepare(claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

func (d *driver) prepare(claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	var wanted []preparedDevice
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.name {
			continue
		}
		wanted = append(wanted, preparedDevice{
			Request: result.Request,
			Pool:    result.Pool,
			Device:  result.Device,
			Admin:   ptr.Deref(result.AdminAccess, false),
		})
	}
	if len(wanted) == 0 {
		return nil, fmt.Errorf("claim %s/%s has no device of %s", claim.Namespace, claim.Name, d.name)
	}
	prepared, err := d.state.prepare(claim.UID, wanted)
	if err != nil {
		return nil, err
	}
	devices := make([]kubeletplugin.Device, 0, len(prepared))
	for _, device := range prepared {
		devices = append(devices, kubeletplugin.Device{
			Requests:     []string{device.Request},
			PoolName:     device.Pool,
			DeviceName:   device.Device,
			CDIDeviceIDs: []string{device.CDIDeviceID},
		})
	}
	return devices, nil
}

func (d *driver) UnprepareResourceClaims(
	_ context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		results[claim.UID] = d.state.unprepare(claim.UID)
	}
	return results, nil
}

func (d *driver) HandleError(ctx context.Context, err error, msg string) {
	runtime.HandleErrorWithContext(ctx, err, msg)
}

func (d *driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}
