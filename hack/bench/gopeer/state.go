// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	cdi "tags.cncf.io/container-device-interface/specs-go"
)

const cdiClass = "claim"

// preparedDevice is one device of a prepared claim, as the checkpoint keeps it.
type preparedDevice struct {
	Request        string              `json:"request"`
	Pool           string              `json:"pool"`
	Device         string              `json:"device"`
	Admin          bool                `json:"admin,omitempty"`
	CDIDeviceID    string              `json:"cdiDeviceID"`
	ContainerEdits *cdi.ContainerEdits `json:"containerEdits"`
}

// checkpoint is the whole record of the driver: one JSON document, read and written whole, as Go drivers do.
type checkpoint struct {
	APIVersion string                         `json:"apiVersion"`
	Claims     map[types.UID][]preparedDevice `json:"preparedClaims"`
}

type state struct {
	checkpointPath string
	cdiDir         string
	driverName     string

	// cache is the CDI library as public drivers use it; nil where the driver writes its files itself.
	cache *cdiapi.Cache
}

func newState(checkpointPath, cdiDir, driverName string, cdiLibrary bool) (*state, error) {
	s := &state{checkpointPath: checkpointPath, cdiDir: cdiDir, driverName: driverName}
	if cdiLibrary {
		cache, err := cdiapi.NewCache(cdiapi.WithSpecDirs(cdiDir))
		if err != nil {
			return nil, err
		}
		s.cache = cache
	}
	_, err := s.load()
	if errors.Is(err, fs.ErrNotExist) {
		err = s.save(&checkpoint{APIVersion: "v1", Claims: map[types.UID][]preparedDevice{}})
	}
	return s, err
}

// prepare is idempotent. Order: CDI file, then checkpoint, so that a recorded claim always has its file.
func (s *state) prepare(uid types.UID, wanted []preparedDevice) ([]preparedDevice, error) {
	record, err := s.load()
	if err != nil {
		return nil, err
	}
	if prepared, found := record.Claims[uid]; found {
		return prepared, nil
	}
	for holder, devices := range record.Claims {
		for _, held := range devices {
			for _, device := range wanted {
				if held.Device == device.Device && held.Pool == device.Pool && !held.Admin && !device.Admin {
					return nil, fmt.Errorf("device %s is held by claim %s", device.Device, holder)
				}
			}
		}
	}
	for index := range wanted {
		device := &wanted[index]
		name := fmt.Sprintf("%s-%s", uid, device.Device)
		device.CDIDeviceID = parser.QualifiedName(s.driverName, cdiClass, name)
		device.ContainerEdits = &cdi.ContainerEdits{Env: []string{fmt.Sprintf("GPU_DEVICE_%d=%s", index, device.Device)}}
	}
	if err := s.writeSpec(uid, wanted); err != nil {
		return nil, err
	}
	record.Claims[uid] = wanted
	if err := s.save(record); err != nil {
		return nil, err
	}
	return wanted, nil
}

// unprepare is idempotent: an unknown claim is a success.
func (s *state) unprepare(uid types.UID) error {
	record, err := s.load()
	if err != nil {
		return err
	}
	if _, found := record.Claims[uid]; !found {
		return nil
	}
	if err := s.removeSpec(uid); err != nil {
		return err
	}
	delete(record.Claims, uid)
	return s.save(record)
}

func (s *state) load() (*checkpoint, error) {
	data, err := os.ReadFile(s.checkpointPath)
	if err != nil {
		return nil, err
	}
	record := &checkpoint{}
	if err := json.Unmarshal(data, record); err != nil {
		return nil, fmt.Errorf("%s: %w", s.checkpointPath, err)
	}
	return record, nil
}

func (s *state) save(record *checkpoint) error {
	data, err := json.Marshal(record)
	if err != nil {
		return err
	}
	return writeAtomic(s.checkpointPath, data, true)
}

func (s *state) writeSpec(uid types.UID, devices []preparedDevice) error {
	spec := &cdi.Spec{Kind: s.driverName + "/" + cdiClass}
	for _, device := range devices {
		spec.Devices = append(spec.Devices, cdi.Device{
			Name:           fmt.Sprintf("%s-%s", uid, device.Device),
			ContainerEdits: *device.ContainerEdits,
		})
	}
	version, err := cdi.MinimumRequiredVersion(spec)
	if err != nil {
		return err
	}
	spec.Version = version
	if s.cache != nil {
		return s.cache.WriteSpec(spec, s.specName(uid))
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	// The CDI library renames its files into place without a sync; so does this.
	return writeAtomic(s.specPath(uid), data, false)
}

func (s *state) removeSpec(uid types.UID) error {
	if s.cache != nil {
		return s.cache.RemoveSpec(s.specName(uid))
	}
	if err := os.Remove(s.specPath(uid)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (s *state) specName(uid types.UID) string {
	return cdiapi.GenerateTransientSpecName(s.driverName, cdiClass, string(uid))
}

func (s *state) specPath(uid types.UID) string {
	return filepath.Join(s.cdiDir, s.specName(uid)+".json")
}

// writeAtomic replaces path as a whole. With sync, the content is on the disk before the name is.
func writeAtomic(path string, data []byte, sync bool) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(file.Name())
		}
	}()
	_, err = file.Write(data)
	if err == nil && sync {
		err = file.Sync()
	}
	err = errors.Join(err, file.Close())
	if err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
